import torch.distributed as dist

from support.threads import one_thread  # noqa: F401 - of all tests here

collect_ignore = [] if dist.is_available() else ["test_ranks.py"]
