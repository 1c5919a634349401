"""Configuration files of other trainers as recipes: one table of keys per format, and one reader for all."""
