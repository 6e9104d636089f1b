"""How a model and its optimizer lie on the ranks, and how a step's gradient comes together."""

from seqmesh.trainer.replicas.make import make_replica as make_replica
from seqmesh.trainer.replicas.make import sharding_of as sharding_of
from seqmesh.trainer.replicas.replica import Replica as Replica
from seqmesh.trainer.replicas.replica import Sharding as Sharding
