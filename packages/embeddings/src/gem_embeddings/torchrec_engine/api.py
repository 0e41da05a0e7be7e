"""Everything of torchrec and fbgemm that this package uses, and the only file that imports them.

They are imported when something of them is first needed. They are not typed here: the package is
checked, and runs, where they are not installed.
"""

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.remote_device import _remote_device

from gem_embeddings.torchrec_engine.versions import INSTALL, misfit
from gem_opkit.errors import UnsupportedError, refusal

# Name -> module that has it.
_PLACES = {
    "CommType": "torchrec.distributed.fbgemm_qcomm_codec",
    "DMPCollection": "torchrec.distributed.model_parallel",
    "DMPCollectionContext": "torchrec.distributed.types",
    "DataType": "torchrec.modules.embedding_configs",
    "DistributedModelParallel": "torchrec.distributed.model_parallel",
    "EmbOptimType": "fbgemm_gpu.split_embedding_configs",
    "EmbeddingBagCollection": "torchrec.modules.embedding_modules",
    "EmbeddingBagCollectionSharder": "torchrec.distributed.embeddingbag",
    "EmbeddingBagConfig": "torchrec.modules.embedding_configs",
    "EmbeddingCollection": "torchrec.modules.embedding_modules",
    "EmbeddingCollectionSharder": "torchrec.distributed.embedding",
    "EmbeddingConfig": "torchrec.modules.embedding_configs",
    "EmbeddingModuleShardingPlan": "torchrec.distributed.types",
    "KeyedJaggedTensor": "torchrec.sparse.jagged_tensor",
    "ParameterSharding": "torchrec.distributed.types",
    "PoolingType": "torchrec.modules.embedding_configs",
    "QCommsConfig": "torchrec.distributed.fbgemm_qcomm_codec",
    "ShardingEnv2D": "torchrec.distributed.types",
    "ShardingPlan": "torchrec.distributed.types",
    "ShardingStrategy": "torchrec.distributed.types",
    "get_qcomm_codecs_registry": "torchrec.distributed.fbgemm_qcomm_codec",
}


@functools.cache
def torchrec_api() -> Any:
    """Import torchrec and fbgemm.

    Returns:
        an object with every name of theirs that this package uses, and ``comm``, the module in
        which torchrec keeps the process groups of hosts.

    Raises:
        UnsupportedError: one of them is not installed or does not load; the message has the
            versions that go together and the command that installs them.
    """
    versions = [_version("torchrec"), _version("fbgemm-gpu-cpu") or _version("fbgemm-gpu")]
    try:
        found = SimpleNamespace(
            **{name: getattr(importlib.import_module(m), name) for name, m in _PLACES.items()},
            comm=importlib.import_module("torchrec.distributed.comm"),
        )
    # A build for another torch fails with OSError or AttributeError, according to what is missing.
    except (ImportError, OSError, AttributeError, RuntimeError) as fault:
        text = f"{type(fault).__name__}: {fault}".splitlines()[0]
        raise UnsupportedError(
            refusal(
                "TorchrecTables",
                "engine='torchrec'",
                must="have a torchrec and an fbgemm that load beside this torch",
                got=misfit(torch.__version__, versions[1], versions[0]) or text,
                fix=f'run: {INSTALL} (on a CPU), or use engine="torch", which needs neither',
            )
        ) from fault
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_collection(
    module: torch.nn.Module,
    plan: Any,
    sharders: list[Any],
    *,
    device: torch.device,
    world_size: int,
    group_size: int,
    host_ranks: int,
) -> Any:
    """Shard the collections inside a module over sharding groups, by torchrec's ``DMPCollection``.

    Args:
        module: whose children are collections on the meta device.
        plan: torchrec's plan; names ranks of a sharding group, and is changed.
        sharders: of these collections.
        device: of the tables.
        world_size: all ranks.
        group_size: ranks of a sharding group.
        host_ranks: ranks of a sharding group on one host.

    Returns:
        the ``DMPCollection``; its ``module`` holds the sharded collections.
    """
    api = torchrec_api()
    # torchrec keeps the groups of one host size for the life of a process; ours may differ.
    for name in ("_INTRA_PG_2D", "_CROSS_PG_2D", "_NODE_GROUP_SIZE_2D"):
        setattr(api.comm, name, None)
    given: dict[str, Any] = {
        "module": module,
        "device": device,
        "plan": plan,
        "world_size": world_size,
        "sharding_group_size": group_size,
        "global_pg": dist.group.WORLD,
        "node_group_size": host_ranks,
        "sharders": sharders,
    }
    with _news_of_torchrec_left_out():
        if device.type == "cpu":
            return _cpu_collection_class()(**given)
        return api.DMPCollection(**given, init_data_parallel=False)


@contextmanager
def _news_of_torchrec_left_out() -> Iterator[None]:
    """Drop what torchrec logs as warnings of every process group that it makes."""

    def is_not_torchrec(record: logging.LogRecord) -> bool:
        return "torchrec" not in Path(record.pathname).parts or record.levelno > logging.WARNING

    root, own = logging.getLogger(), logging.getLogger("torchrec")
    level = own.level
    root.addFilter(is_not_torchrec)
    own.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.removeFilter(is_not_torchrec)
        own.setLevel(level)


@functools.cache
def _cpu_collection_class() -> Any:
    """``DMPCollection`` whose constructor does not refuse the CPU; what it calls runs on gloo."""
    api = torchrec_api()

    class CpuCollection(api.DMPCollection):
        def __init__(
            self,
            module: torch.nn.Module,
            device: torch.device,
            plan: Any,
            world_size: int,
            sharding_group_size: int,
            global_pg: Any,
            node_group_size: int,
            sharders: list[Any],
        ) -> None:
            self._device, self._pg = device, global_pg
            self._global_rank = dist.get_rank(global_pg)
            self._custom_all_reduce = None
            # What later versions of torchrec read as well.
            self._use_sharded_relay, self._sharded_relay_state = False, None
            self._sharder_map = {sharder.module_type: sharder for sharder in sharders}
            context = api.DMPCollectionContext(
                module=None,
                plan=plan,
                sharding_group_size=sharding_group_size,
                node_group_size=node_group_size,
                use_inter_host_allreduce=False,
                sharding_strategy=api.ShardingStrategy.DEFAULT,
            )
            self._default_ctx, self._submodule_ctxs, self._ctxs = context, [], [context]
            context.device_mesh, context.sharding_pg, context.replica_pg = (
                self._create_process_groups(self._global_rank, world_size, sharding_group_size)
            )
            step = world_size // sharding_group_size
            self._remap_sharding_plan(plan, self._global_rank, step, sharding_group_size)
            _name_cpu(plan)
            env = api.ShardingEnv2D(
                global_pg=global_pg,
                sharding_pg=context.sharding_pg,
                replica_pg=context.replica_pg,
                device_mesh=context.device_mesh,
                node_group_size=node_group_size,
            )
            api.DistributedModelParallel.__init__(
                self, module, env, device, plan, sharders, init_data_parallel=False
            )
            self._group_sharded_modules(self._ctxs)
            self._cache_sync_tensors(self._ctxs)

    return CpuCollection


def _name_cpu(plan: Any) -> None:
    """The remapping numbers CPUs as if they were GPUs; a CPU has no number."""
    for tables in plan.plan.values():
        for sharding in tables.values():
            for shard in sharding.sharding_spec.shards:
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
