"""`crossdock demo`: small random models, served and compared with themselves. Needs `transformers`."""
