"""What a GPU is called, and how warm it is."""

import contextlib


def device_name(device: str) -> str:
    """The name that the driver tells of a GPU, as "NVIDIA H200"; "cpu" for the CPU."""
    if device == "cpu":
        return device
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(int(device.partition(":")[2]))
    return properties["name"].decode(errors="replace")


class Sensors:
    """Temperature and power of an NVIDIA GPU, through its driver's NVML; nothing where that is not there."""

    def __init__(self, device: str):
        self._reads: dict = {}  # name -> function
        if not device.startswith("cuda"):
            return
        try:
            import cupy
            import pynvml

            pynvml.nvmlInit()
            # By its place on the bus: NVML also counts GPUs that CUDA_VISIBLE_DEVICES hides.
            bus = cupy.cuda.runtime.deviceGetPCIBusId(int(device.partition(":")[2]))
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
        except Exception:  # no library, no driver, a GPU that it does not list: then nothing is told
            return
        self._reads = {
            "gpu_temperature_c": lambda: int(
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }

    def read(self) -> dict[str, float]:
        """gpu_temperature_c and gpu_power_w, those of them that the driver tells."""
        told = {}
        for name, read in self._reads.items():
            with contextlib.suppress(Exception):  # parts of a GPU (MIG) have no power of their own
                told[name] = read()
        return told
