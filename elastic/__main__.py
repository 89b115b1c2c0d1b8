"""`python -m elastic` is `elastic`."""

from elastic.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
