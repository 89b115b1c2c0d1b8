"""`elastic certify`: what this package promises, tried on the user's own machine within the minutes
given, with numbers.

Importing these modules brings neither torch nor ray nor pydantic along; `python -m elastic.certify`
needs only torch, NumPy and xxhash, so that it also runs where Ray is not installed.
"""
