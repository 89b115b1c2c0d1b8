"""`python -m elastic.certify` is `elastic certify`, also where Ray and pydantic are not installed."""

from elastic.certify.command import main

if __name__ == "__main__":
    raise SystemExit(main())
