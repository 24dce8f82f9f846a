"""The command line, one file per group of commands. Layer rule: parses, calls api, prints; decides nothing."""
