"""PyTorch: ShardedOptimizer in the place of torch's optimizers, LocalSGD around one, ddp_hook for DistributedDataParallel,
FSDPState for fully sharded models; own_shards keeps the shards in the workers' processes."""

from ._ddp import DDPState, ddp_hook
from ._fsdp import FSDPState
from ._job import DEFAULT_CODEC
from ._local import LocalSGD
from ._own_shards import own_shards
from ._sharded import ShardedOptimizer
from ._snapshot import load_parameters

__all__ = ["DEFAULT_CODEC", "DDPState", "FSDPState", "LocalSGD", "ShardedOptimizer", "ddp_hook", "load_parameters", "own_shards"]
