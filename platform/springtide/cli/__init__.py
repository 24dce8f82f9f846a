"""The command line, one file per group of commands. Layer rule: parses, calls app, prints; decides nothing."""
