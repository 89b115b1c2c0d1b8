"""`python -m elastic.certify` is `elastic certify`, also where Ray is not installed."""

from elastic.certify.certify_command import main

if __name__ == "__main__":
    raise SystemExit(main())
