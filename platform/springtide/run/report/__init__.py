"""HTML pages: charts, a run, a sweep, a dataset. Layer rule: values in, HTML out; reads no folder."""
