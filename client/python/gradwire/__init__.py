"""Gradwire: training through parameter-shard servers with compressed gradients.

`gradwire.torch.ShardedOptimizer` is a torch.optim.Optimizer; `join` is the session underneath, for NumPy and others.
"""

from ._cluster import LocalCluster, local_cluster
from ._core import guess_role
from ._errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, GradwireError,
                      InvalidArgument, NotFound, ResourceExhausted, Unavailable)
from ._job import Group, JobSpec, Rule, TensorSpec, default_rules
from ._progress import Progress
from ._session import Session, join
from ._shard_server import ShardServer
from ._trace import Trace

__all__ = [
    "Aborted", "AlreadyExists", "Cancelled", "DataLoss", "DeadlineExceeded", "FailedPrecondition", "GradwireError",
    "Group", "InvalidArgument", "JobSpec", "LocalCluster", "NotFound", "Progress", "ResourceExhausted", "Rule", "Session", "ShardServer",
    "TensorSpec", "Trace", "Unavailable", "default_rules", "guess_role", "join", "local_cluster",
]
__version__ = "0.1.0"
