"""The gated MLP, eager and compiled: shows the kernels between its three GEMMs, and which ones the compiler fuses."""

import environment  # noqa: F401
import session
import setups


def main() -> None:
    parser = session.arguments(__doc__, {"batch": 64, "seq": 128, "dim": 768, "hidden": 3072})
    parser.add_argument("--compile", action="store_true", help="profile the compiled MLP too")
    given = parser.parse_args()
    implementations = ("compile",) if given.compile else ()
    session.run(setups.mlp(given.batch, given.seq, given.dim, given.hidden, implementations), given.out)


if __name__ == "__main__":
    main()
