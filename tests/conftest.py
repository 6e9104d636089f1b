"""What every test shares: hypothesis without per-example deadlines, since the machine may be busy with other ranks."""

import os
import tempfile

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test finds what another run, or a user, keeps in the cache.
os.environ["SEQMESH_CACHE"] = tempfile.mkdtemp(prefix="seqmesh-test-cache-")
settings.register_profile("seqmesh", deadline=None)
settings.load_profile("seqmesh")
