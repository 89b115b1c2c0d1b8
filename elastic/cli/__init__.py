"""The command line: parse, call the api, print. One file per group of verbs."""
