"""python -m reference_impl.simulation.workloads table | write NAME FILE: the README's tables; a workload as a file."""

from __future__ import annotations

import argparse

from reference_impl.simulation.workloads import names, traces_folder, workload, write_jsonl
from reference_impl.simulation.workloads.table import BEGIN, END, tables


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.simulation.workloads", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="measure the workloads and print the tables")
    table.add_argument("--write", action="store_true", help="put them into datasets/traces/README.md")
    write = commands.add_parser("write", help="write the requests of a workload as JSON lines")
    write.add_argument("name", help=f"{', '.join(names())}, or a .yaml file")
    write.add_argument("file")
    write.add_argument("--num", type=int, default=1000)
    write.add_argument("--seed", type=int, default=0)
    write.add_argument("--rate", type=float)
    write.add_argument("--arrivals", choices=["poisson", "bursty", "diurnal", "closed_loop"])
    args = parser.parse_args()
    try:
        if args.command == "write":
            load = workload(
                args.name, seed=args.seed, rate=args.rate, num_requests=args.num, arrivals=args.arrivals
            )  # fmt: skip
            print(f"{write_jsonl(args.file, load):,} requests in {args.file}")
        elif args.write:
            readme = traces_folder() / "README.md"
            before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
            readme.write_text(f"{before}{BEGIN}\n{tables()}{END}{rest.split(END, 1)[1]}", encoding="utf-8")
        else:
            print(tables(), end="")
    except (ValueError, OSError) as error:
        raise SystemExit(f"inferlab: error: {error}") from None


if __name__ == "__main__":
    main()
