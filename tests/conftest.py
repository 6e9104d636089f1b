"""What every test shares: hypothesis without per-example deadlines, since the machine may be busy with other ranks."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("seqmesh", deadline=None)
settings.load_profile("seqmesh")
