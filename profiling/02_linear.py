"""One nn.Linear, eager and compiled: shows what a single layer puts into the trace."""

import environment  # noqa: F401
import session
import setups


def main() -> None:
    parser = session.arguments(__doc__, {"batch": 1024, "in_dim": 32, "out_dim": 64})
    parser.add_argument("--compile", action="store_true", help="profile the compiled layer too")
    given = parser.parse_args()
    session.run(setups.linear(given.batch, given.in_dim, given.out_dim, given.compile), given.out)


if __name__ == "__main__":
    main()
