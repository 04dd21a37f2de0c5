"""parameter_server: the first ranks keep the weights and apply the updates, the others compute gradients.

After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014). A *ticket* is a share of
one step's global batch. A worker computes its ticket, pushes the gradient to the servers, each of which takes what
concerns its own part of the parameters, and waits for new weights. When these come is the only difference of the modes:

* ``sync``: when all tickets of the step have come and were applied together, added up in the order of the shares: the
  steps of ddp, to rounding. Nothing depends on who was faster, so a resume is the same bit for bit.
* ``async``: at once; each ticket is an update of its own (Hogwild's and DistBelief's way).
* ``bounded``: so, too, but a worker that is ``staleness`` tickets ahead of the slowest waits for it (Stale Synchronous
  Parallel, Ho et al., NIPS 2013).

Length of the steps. In ``async`` and ``bounded`` the gradient of a ticket is the mean over its own samples, and is
applied with the learning rate times its share of the global batch. So a pass over the data moves the weights as far as
in ``sync``, also with optimizers such as Adam that make every gradient equally long.

Deaths. Only pairs of ranks talk while training (see mail.py), so a worker's death disturbs nobody. Which samples a
ticket holds follows from the step and the share, so any other worker can compute it, and does: in ``sync`` the result
has the same bits as if nobody had died. Rank 0, a server, writes the checkpoints; a server's death ends the attempt.
"""

from __future__ import annotations

from toolkit.config import StrategyConfig, TrainConfig
from toolkit.dist.session import Session
from toolkit.errors import ConfigError
from toolkit.strategies.parameter_server.servers import AsyncServer, SyncServer
from toolkit.strategies.parameter_server.worker import Worker


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> SyncServer | AsyncServer | Worker:
    """This rank's side of it. Raises ConfigError when there would be no worker."""
    chosen = config.parameter_server
    if chosen.servers >= session.world_size:
        raise ConfigError(
            f"strategy.parameter_server.servers: {chosen.servers} of {session.world_size} ranks leave no worker; use "
            "fewer, or more ranks"
        )
    if session.rank >= chosen.servers:
        return Worker(session, chosen, train, recompute=config.activation_checkpointing)
    if chosen.mode == "sync":
        return SyncServer(session, chosen, train)
    return AsyncServer(session, chosen, train, ahead=chosen.staleness if chosen.mode == "bounded" else None)
