"""parameter_server: the first ranks keep the weights and apply the updates, the others compute gradients.

After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014). A *ticket* is a share of
one step's global batch. A worker computes its ticket and pushes the gradient to the servers, each of which takes what
concerns its own part of the parameters. Then it waits for new weights. The modes differ only in when these come:

* ``sync``: when all tickets of the step have come and were applied together, added up in the order of the shares: the
  steps of ddp, to rounding. Nothing depends on which worker was faster, so a resume is the same bit for bit.
* ``async``: at once; each ticket is an update of its own (Hogwild's and DistBelief's way).
* ``bounded``: at once, too, but a worker that is ``staleness`` tickets ahead of the slowest waits for it (Stale
  Synchronous Parallel, Ho et al., NIPS 2013).

Length of the steps. In ``async`` and ``bounded`` the gradient of a ticket is the mean over its own samples, and is
applied with the learning rate times its share of the global batch. So a pass over the data moves the weights as far as
in ``sync``, also with optimizers such as Adam that make every gradient equally long.

Rank 0, a server, writes the checkpoints. A rank's death ends the attempt, as with any strategy.
"""

from __future__ import annotations

from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig, TrainConfig, choose
from toolkit.config.strategy import ParameterServerConfig
from toolkit.plugins.methods.parameter_server.servers import AsyncServer, SyncServer
from toolkit.plugins.methods.parameter_server.worker import Worker
from toolkit.ranks.session import Session
from toolkit.strategies.models import recomputed


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> SyncServer | AsyncServer | Worker:
    """Return this rank's side of it. Raises ConfigError if there would be no worker."""
    chosen: ParameterServerConfig = config.parameter_server
    if chosen.servers >= session.world_size:
        raise ConfigError(
            f"strategy.parameter_server.servers: {chosen.servers} of {session.world_size} ranks leave no worker; use "
            "fewer, or more ranks"
        )
    # By how many shares a worker may be ahead; None: of any number, or of none where all wait for each other.
    ahead = choose(
        "strategy.parameter_server.mode", chosen.mode, {"sync": None, "async": None, "bounded": chosen.staleness}
    )
    if session.rank >= chosen.servers:
        return Worker(session, chosen, train, recompute=recomputed(config))
    if chosen.mode == "sync":
        return SyncServer(session, chosen, train)
    return AsyncServer(session, chosen, train, ahead=ahead)
