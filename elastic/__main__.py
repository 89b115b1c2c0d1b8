"""`python -m elastic` is `elastic`."""

from elastic.cli.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
