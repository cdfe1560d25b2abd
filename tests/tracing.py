"""A capture that needs no GPU: what a call did to tensors, traced, with Python's numbers and the addresses built in."""

from torch.fx.experimental.proxy_tensor import make_fx


class Tracer:
    """`capture` for ReplayedSteps, counting captures and replays."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, run):
        self.captures += 1
        traced = make_fx(run)()

        def replay():
            self.replays += 1
            return traced()

        return replay
