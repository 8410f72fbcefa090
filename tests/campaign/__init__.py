"""Random tables, damage, kills and threads, many at a time: ``make campaign N=1000 SEED=0``."""
