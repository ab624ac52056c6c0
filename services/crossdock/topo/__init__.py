"""`crossdock topo`: where the facts come from (sources), and how a topology is shown (listing, picture)."""
