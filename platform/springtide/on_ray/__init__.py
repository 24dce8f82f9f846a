"""The only package that imports Ray. Rule: Ray carries out what other packages decide; its private parts are touched in
one file each."""
