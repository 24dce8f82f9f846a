"""The only room that imports Ray. Law: Ray carries out what other rooms decide; its private parts are touched in one file
each."""
