"""What the tests of this package share."""

import importlib.util

from gem_parallel import testing

# Ranks are forked from a process that has imported this: torchrec takes each of them seconds.
if importlib.util.find_spec("torchrec") is not None:
    testing._CONTEXT.set_forkserver_preload(
        ["torch", "torch.distributed", "torch._dynamo", "torchrec", "torchrec.distributed"]
    )
