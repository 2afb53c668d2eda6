"""Pipeline parallelism: a model's layers are split over several engines, which run in turn."""
