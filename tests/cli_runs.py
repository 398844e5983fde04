"""What tests of the command line train on."""

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 60
TINY = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --steps 12 --batch-size 4 --device cpu".split()
