"""All-gather, reduce-scatter and all-reduce among the ranks of a group, and matmuls that overlap with them.

Same groups, transports, deadlines and errors as dispatch and combine. Importing it does nothing but define names.
docs/collectives.md says what moves where and what is left to torch.distributed.
"""

from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities
from ep_kernels.collectives.collectives import Collectives
from ep_kernels.collectives.work import Work

__all__ = ["Algorithm", "CollectiveCapabilities", "CollectiveConfig", "Collectives", "Work"]
