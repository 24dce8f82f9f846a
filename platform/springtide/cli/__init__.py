"""The command line, one file per group of commands. Layer rule: a command parses its options, calls ``api`` and prints
the result; all decisions are made elsewhere."""
