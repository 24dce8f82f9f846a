"""A fuzzer of all that springtide reads from files: rotten or hostile input is taken for what it is, or refused by name.

    samples       valid files, written by the code of the project
      |           one seed: a target, a file of it, a change        mutations.py
      v
    the reader    the functions that commands call                  run_files.py, data_files.py
      |
      v
    outcome       accepted | refused by one of our errors that names the file | a violation

A child process with limits reads them (child.py): a violation is also more than 2 s of CPU, 512 MiB, or the end of the process.
"""
