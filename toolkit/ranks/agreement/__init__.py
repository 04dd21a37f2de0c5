"""The gate: all ranks agree at which step number something happens.

That takes no collective and no host sync. Each rank has its own clock, signals and speed. What they must do together,
above all stop, is agreed over the store that the ranks share, in rounds numbered 0, 1, 2, ...::

    some rank    request("stop")           from a signal handler too: a queue takes it, a thread of the gate continues
                 claim  <round>/proposal   atomic: the first kind proposed has the round; then every rank is called
    each rank    wait   <round>/call/rank  its watcher thread wakes up, *closes the gate, and only then reads* the
                                           number of the last step started
                 set    <round>/ack/rank   and acknowledges with it
    the last     set    <round>/decision   max(acknowledged) + 1
    each rank    boundary(decision)        hands the kind out; for all kinds but "stop" the next round begins

Why it is correct:

* **An acknowledgement is a promise.** From then until the decision this rank starts no step that it has not
  acknowledged, so no rank is ever past the decision. The loop notes the step *before* it tests the gate, and the
  watcher closes the gate *before* it reads the step: whichever comes first, the other sees it.
* The main thread keeps the promise; the acknowledgement needs only the watcher. A rank that evaluates, compiles, saves
  or waits for data acknowledges at once.
* One decision per round: the proposal is claimed atomically, and only the rank that brings the count to the world
  size decides. Proposing again, later, or on many ranks changes nothing.
* A rank takes part in round r + 1 only after it has handed out round r.
* **Leaving is an acknowledgement for good.** ``close()`` acknowledges the round that is open or comes next, and marks
  that as this rank's last. The rank that decides a round moves such marks to the next round *before* it publishes the
  decision, when no rank can be there yet. So no rank waits for one that has left, and ``close()`` never waits for
  a rank that is alive.

If the decision lies beyond the last step, no rank reaches it: all complete instead. The store keeps two short keys per
round.
"""

from toolkit.ranks.agreement.gate import Gate, StalledRequest
from toolkit.ranks.agreement.rounds import PREFIX, STOP, Transport, propose

__all__ = ["PREFIX", "STOP", "Gate", "StalledRequest", "Transport", "propose"]
