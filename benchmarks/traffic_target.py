"""What the traffic suite runs under ncu: every call once, in the suite's order, each behind a marker kernel."""

import argparse

import torch

from . import rivals
from .suites import traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    traffic.add_arguments(parser)
    parser.add_argument("--rivals", nargs="+", required=True)
    args = parser.parse_args()
    profiler = torch.cuda.profiler
    for cell in traffic.cells(args):
        tensors = cell.tensors("cuda", requires_grad=True)
        for name in args.rivals:
            rival = rivals.RIVALS[name]
            grad_out = torch.randn_like(tensors[0])
            for profiled in (False, True):  # the first round warms up and is not counted
                out = tensors[0]
                for direction in traffic.DIRECTIONS:
                    torch.cuda.synchronize()
                    if profiled:
                        profiler.start()
                        torch.cuda._sleep(1)
                    with rival.context():
                        if direction == "forward":
                            out = rival.attention(*tensors, cell)
                        else:
                            torch.autograd.grad(out, tensors[:3], grad_out)
                    torch.cuda.synchronize()
                    if profiled:
                        profiler.stop()


if __name__ == "__main__":
    main()
