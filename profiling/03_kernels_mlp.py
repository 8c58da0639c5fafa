"""The gated MLP with hand-written kernels, Liger's and this package's, beside the eager one."""

import sys

import environment  # noqa: F401
import session
import setups


def main() -> None:
    parser = session.arguments(__doc__, {"batch": 64, "seq": 128, "dim": 768, "hidden": 3072})
    parser.add_argument("--implementation", choices=("liger", "ours", "ours-triton"), default="ours", help=" ")
    parser.add_argument("--compile", action="store_true", help="profile ours under torch.compile too")
    given = parser.parse_args()
    if given.compile and given.implementation != "ours":
        sys.exit(f"--compile goes with --implementation ours, got {given.implementation}")
    implementations = (given.implementation, *(("ours-compile",) if given.compile else ()))
    try:
        workload = setups.mlp(given.batch, given.seq, given.dim, given.hidden, implementations)
    except ValueError as error:
        sys.exit(str(error))
    session.run(workload, given.out)


if __name__ == "__main__":
    main()
