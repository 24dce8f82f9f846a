"""The only package that imports Ray. Rule: other packages decide, Ray executes; each private part of Ray is used in one
file only."""
