"""The ``elastic`` section: how many workers, of which size, and what happens when nodes come and go."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from springtide.config.quantities import Seconds, Until
from springtide.config.section import Section, free
from springtide.errors import explain

_OURS = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_OURS_BEGIN = ("RAY_", "TORCH_NCCL_", "TORCHELASTIC_")
"""Names, and beginnings of names, of environment variables that ``elastic.env`` must not set. They decide a worker's rank and
device, and how it leaves its process group."""
_ALLOWED = """
    NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME
    NCCL_IB_HCA NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_ROCE_VERSION_NUM
    NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_PKEY NCCL_IB_SL NCCL_IB_TC NCCL_IB_FIFO_TC NCCL_IB_AR_THRESHOLD
    NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_PCI_RELAXED_ORDERING
    NCCL_IB_CUDA_SUPPORT NCCL_IB_MERGE_NICS NCCL_CROSS_NIC NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_GDR_C2C
    NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_DMABUF_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_DIRECT_DISABLE
    NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_PXN_LEVEL NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MIN_NCHANNELS
    NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_MIN_P2P_NCHANNELS NCCL_MAX_P2P_NCHANNELS NCCL_CGA_CLUSTER_SIZE
    NCCL_ALGO NCCL_PROTO NCCL_NVLS_ENABLE NCCL_MNNVL_ENABLE NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_COLLNET_ENABLE
    NCCL_COLLNET_NODE_THRESHOLD NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_LOCAL_REGISTER NCCL_LAUNCH_MODE
    NCCL_CHECK_POINTERS NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_IGNORE_CPU_AFFINITY NCCL_IGNORE_DISABLED_P2P NCCL_RAS_ENABLE
    GLOO_SOCKET_IFNAME FI_PROVIDER FI_LOG_LEVEL FI_TCP_IFACE FI_EFA_USE_DEVICE_RDMA FI_EFA_FORK_SAFE FI_EFA_USE_HUGE_PAGE
    FI_EFA_SET_CUDA_SYNC_MEMOPS FI_MR_CACHE_MONITOR OFI_NCCL_PROTOCOL OFI_NCCL_DISABLE_DMABUF RDMAV_FORK_SAFE
    RDMAV_HUGEPAGES_SAFE UCX_NET_DEVICES UCX_TLS UCX_IB_GID_INDEX CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER
    CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE PYTORCH_ALLOC_CONF
    PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS MKL_NUM_THREADS TORCH_CPP_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG
    TORCH_SHOW_CPP_STACKTRACES
"""
ALLOWED_ENV = frozenset(_ALLOWED.split())
"""Environment variables that ``elastic.env`` may set without the user's trust. They hold a network interface, a level, a switch
or a number. Any other variable may load a library, run a program or write a file, so it needs ``--trust-code``. Examples:
``LD_PRELOAD``, ``NCCL_NET_PLUGIN``, ``NCCL_DEBUG_FILE``, and ``TORCH_LOGS``, which imports the modules that it names."""
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|ACCESS_KEY|API_KEY", re.IGNORECASE)


_VALUE = re.compile("[^\\x00-\\x1f\\x7f]{0,4096}")
_PLAIN = re.compile(r"[\w.,:;=^/@+~ -]{0,1000}", re.ASCII)
"""Pattern of values that the variables in ``ALLOWED_ENV`` may have without the user's trust. It excludes ``$``, because Ray
replaces ``${NAME}`` by the value of another variable."""


class ElasticConfig(Section):
    """How many workers, of which size, and how to handle failures and lost nodes."""

    min_workers: int = free(default=1, ge=1)
    """Fewest workers to train with; with fewer, the run waits [workers]."""
    max_workers: int = free(default=2, ge=1)
    """Most workers to use [workers]."""
    cpus_per_worker: float = free(default=1.0, gt=0)
    """Logical CPUs that a worker reserves in Ray [cpus]."""
    gpus_per_worker: float = free(default=0.0, ge=0)
    """GPUs that a worker reserves in Ray [gpus]."""
    env: dict[str, str] = free(default={})
    """Environment variables of the workers on GPUs, set before torch is loaded, such as ``{NCCL_SOCKET_IFNAME: eth0}``. Known
    variables that only hold interfaces, levels and numbers are allowed. Any other variable in a file needs ``--trust-code``,
    because it may load a library or write a file [table]."""
    grow: Literal["when_it_pays", "always", "never"] = free(default="when_it_pays")
    """When to use nodes that join the cluster: if they save more time than the restart takes (when_it_pays), always, or never
    [name]."""
    max_failures: int = free(default=3, ge=0)
    """Most worker failures in 24 hours that a run recovers from; one more stops the run. Lost nodes do not count [failures]."""
    settle: Seconds = free(default=Seconds(2.0), ge=0)
    """Cluster changes that are less than this apart cause one restart together, not one each [s]."""
    wait: Seconds = free(default=Seconds(0.0), ge=0)
    """Longest wait for ``min_workers``. Then the run ends, and can be resumed later; 0 waits forever [s]."""
    deadline: Until = free(default=Until("0s"))
    """When the run must be done: a span since its first start, such as ``8h``, or a time, such as ``2026-12-01T08:00Z``. If
    spot nodes are too few to meet it, the run orders on-demand nodes, which needs ``track.price`` and ``track.spot_price``. 0:
    no deadline, and nothing is ordered [s]."""
    reserve: Seconds = free(default=Seconds(5.0), ge=0)
    """Time before the announced loss of a node that is kept free for saving the state. The run keeps more time free if its
    earlier saves or copies took longer [s]."""
    hang: Seconds = free(default=Seconds(300.0), ge=0)
    """Longest time without a step, and without progress of a save or an evaluation. After this time the workers count as hung
    and are restarted. The limit is at least 20 typical steps. Before the first step it is 12 times this setting. Before the
    first collective: 4 times as long as earlier groups of workers took, if that is less. If all ranks wait for one rank: 3
    typical steps and 10 s. If all ranks wait in a collective: 20 typical steps, at least 30 s. 0 waits forever [s]."""
    compare: Seconds = free(default=Seconds(60.0), ge=0)
    """Time between comparisons of the speeds of all workers' devices, to report slow devices; 0 never compares [s]."""
    recheck: Seconds = free(default=Seconds(60.0), ge=0)
    """Time between checks for devices that compute wrong results. In a check, another worker computes a micro-batch of each
    worker again, which takes the time of one micro-batch. 0 never checks [s]."""
    notices: Literal["auto", "aws", "gcp", "azure", "file", "off"] = free(default="auto")
    """Where each node polls for preemption notices. auto: at the cloud that the firmware names, and in ``notice_file``. aws,
    gcp or azure: at that cloud, and in ``notice_file``. file: only in ``notice_file``. off: nowhere [name]."""
    notice_file: str = free(default="/tmp/springtide-notice-{uid}")
    """File on each node that announces the node's loss: a hook, or `springtide notice`, writes the seconds until the loss.
    ``{node}`` stands for the node's id in Ray. ``{uid}`` stands for a user id: the files of this user and of root (0) are read,
    because root announces for all users. A file of any other owner is refused. Empty: no file is read [name]."""
    metadata_url: str = free(default="")
    """URL of the cloud's metadata service; empty uses http://169.254.169.254, the default of all clouds [url]."""
    leave_on_rebalance: bool = free(default=False)
    """Whether to leave a node when AWS recommends to rebalance it, before its loss is certain [flag]."""

    @property
    def unlisted_env(self) -> dict[str, str]:
        """The variables in ``env`` that need the user's trust, because the name is not in ``ALLOWED_ENV`` or the value is not
        plain: ``elastic.env.NAME`` -> value."""
        return {
            f"elastic.env.{name}": value
            for name, value in sorted(self.env.items())
            if name not in ALLOWED_ENV or not _PLAIN.fullmatch(value)
        }

    @model_validator(mode="after")
    def _check_env(self) -> ElasticConfig:  # a field validator's error would show all values, also secrets
        for name, value in self.env.items():
            field, remedy = f"elastic.env.{name}", "name a variable of NCCL, libfabric, gloo or torch"
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(explain(field, value, "is not a name of a variable", remedy))
            if not _VALUE.fullmatch(value):
                limit = "must be at most 4,096 printable characters"
                raise ValueError(explain(field, value[:100], limit, "shorten it, or remove control characters"))
            if name in _OURS or name.startswith(_OURS_BEGIN):
                raise ValueError(explain(field, value, "is set by springtide, Ray or torchrun", "leave it out"))
            if _SECRET.search(name):
                what = "looks like a secret, and this file and the dashboard show it"
                raise ValueError(explain(field, "...", what, "set it in the environment of the nodes instead"))
        return self

    @model_validator(mode="after")
    def _check(self) -> ElasticConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                explain(
                    "elastic.min_workers",
                    self.min_workers,
                    f"must be at most elastic.max_workers = {self.max_workers}",
                    "lower it or raise max_workers",
                )
            )
        return self
