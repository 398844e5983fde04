"""python -m nbtrain"""

from nbtrain.cli import main

if __name__ == "__main__":
    main()
