"""Nodes of real machines, as their drivers show them in /dev, /proc and /sys.

Written from what the sites and the makers document: which GPU is on which PCI address and NUMA node, and which CPUs
that node has. What the toolkit does not read is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """A node: its NUMA nodes' CPUs, and the PCI address and NUMA node of each GPU in the driver's order."""

    maker: str
    numa_cpus: Sequence[str]
    gpus: Sequence[tuple[str, int]]
    model: str
    tiles: int = 1
    files: Mapping[str, str] = field(default_factory=dict)  #: of each GPU's PCI device

    def write(self, root: Path) -> Path:
        for node, cpus in enumerate(self.numa_cpus):
            _put(root / f"sys/devices/system/node/node{node}/cpulist", cpus)
        for number, (address, node) in enumerate(self.gpus):
            device = root / f"sys/bus/pci/devices/{address}"
            _put(device / "numa_node", node)
            for name, text in self.files.items():
                _put(device / name, text)
            {"NVIDIA": self._nvidia, "AMD": self._amd, "Intel": self._intel}[self.maker](root, number, address)
        return root

    def _nvidia(self, root: Path, number: int, address: str) -> None:
        # open-gpu-kernel-modules, nv-procfs.c
        uuid = f"GPU-{number:08x}-0000-1111-2222-333344445555"
        text = f"Model: \t\t {self.model}\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}"
        _put(root / f"proc/driver/nvidia/gpus/{address}/information", text)
        _put(root / f"dev/nvidia{number}", "")

    def _amd(self, root: Path, number: int, address: str) -> None:
        # Linux, amdkfd, kfd_topology.c: the CPUs are nodes as well, and come first.
        nodes = root / "sys/class/kfd/kfd/topology/nodes"
        for cpu in range(len(self.numa_cpus)):
            _put(nodes / f"{cpu}/properties", "cpu_cores_count 16\nsimd_count 0\ndrm_render_minor 0")
            _put(nodes / f"{cpu}/gpu_id", 0)
        domain, bus, rest = address.split(":")
        slot, function = rest.split(".")
        place = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function, 16)
        node = nodes / str(len(self.numa_cpus) + number)
        fields = {
            "cpu_cores_count": 0,
            "simd_count": 440,
            "location_id": place,
            "domain": int(domain, 16),
            "drm_render_minor": 128 + number,
            "device_id": int(self.model, 16),
            "unique_id": 0x1000 + number,
        }
        _put(node / "properties", "\n".join(f"{name} {value}" for name, value in fields.items()))
        _put(node / "gpu_id", 40_000 + number)
        _put(root / f"dev/dri/renderD{128 + number}", "")

    def _intel(self, root: Path, number: int, address: str) -> None:
        device = root / f"sys/bus/pci/devices/{address}"
        _put(device / "vendor", "0x8086")
        _put(device / "device", self.model)
        _put(device / "uevent", f"DRIVER=i915\nPCI_SLOT_NAME={address}")
        for tile in range(self.tiles):
            (device / f"drm/card{number + 1}/gt/gt{tile}").mkdir(parents=True)
        render = root / f"sys/class/drm/renderD{128 + number}"
        render.mkdir(parents=True)
        (render / "device").symlink_to(device)
        _put(root / f"dev/dri/renderD{128 + number}", "")


def _put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


#: LUMI-G and Frontier: one EPYC 7A53 and four MI250X, whose eight halves (GCD) are not in the order of the CPUs.
#: docs.lumi-supercomputer.eu/hardware/lumig, docs.olcf.ornl.gov/systems/frontier_user_guide.html
_TRENTO = ["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"]
_GCDS = [
    *(("0000:c1:00.0", 3), ("0000:c6:00.0", 3), ("0000:c9:00.0", 1), ("0000:ce:00.0", 1)),
    *(("0000:d1:00.0", 0), ("0000:d6:00.0", 0), ("0000:d9:00.0", 2), ("0000:de:00.0", 2)),
]
LUMI = Machine(
    "AMD",
    _TRENTO,
    _GCDS,
    "0x7408",
    files={
        "gpu_busy_percent": "87",
        "mem_info_vram_used": str(10 << 30),
        "mem_info_vram_total": str(64 << 30),
        "hwmon/hwmon5/power1_average": "231000000",
        "ras/umc_err_count": "ue: 2\nce: 17",
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": "16.0 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
        "product_name": "AMD Instinct MI250X",
    },
)
#: JUPITER: four GH200 with 72 cores each. The GPUs' own memory is in NUMA nodes without CPUs.
#: apps.fz-juelich.de/jsc/hps/jupiter/configuration.html
JUPITER = Machine(
    "NVIDIA",
    ["0-71", "72-143", "144-215", "216-287"],
    [("0009:01:00.0", 0), ("0019:01:00.0", 1), ("0029:01:00.0", 2), ("0039:01:00.0", 3)],
    "NVIDIA GH200 120GB",
)
#: DGX H100: two Xeon 8480C, four of the eight GPUs at each. docs.nvidia.com/dgx/dgxh100-user-guide
DGX = Machine(
    "NVIDIA",
    ["0-55,112-167", "56-111,168-223"],
    [
        *(("0000:1b:00.0", 0), ("0000:43:00.0", 0), ("0000:52:00.0", 0), ("0000:61:00.0", 0)),
        *(("0000:9d:00.0", 1), ("0000:c3:00.0", 1), ("0000:d1:00.0", 1), ("0000:df:00.0", 1)),
    ],
    "NVIDIA H100 80GB HBM3",
)
#: Dawn: two Xeon 8468 and four Data Center GPU Max 1550 of two tiles. docs.hpc.cam.ac.uk/hpc/user-guide/pvc.html
DAWN = Machine(
    "Intel",
    ["0-47", "48-95"],
    [("0000:18:00.0", 0), ("0000:29:00.0", 0), ("0000:9a:00.0", 1), ("0000:ab:00.0", 1)],
    "0x0bd5",
    tiles=2,
    files={
        "hwmon/hwmon4/energy1_input": "7000000000",
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
    },
)
