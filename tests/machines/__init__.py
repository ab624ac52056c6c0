"""Hosts on paper: folders that look like /proc and /sys, and an object that answers like pynvml.

    facts = probe(*hgx_h100(0).write(tmp_path))

Written after the layouts that vendors publish and that `nvidia-smi topo -m` prints on such hosts; see kinds.py.
"""

from tests.machines.host import Host, PaperNvml
from tests.machines.kinds import KINDS, gb200_tray, hgx_h100, mig_h100, no_gpu, pcie_box

__all__ = ["KINDS", "Host", "PaperNvml", "gb200_tray", "hgx_h100", "mig_h100", "no_gpu", "pcie_box"]
