"""`treadle bench serve`: the CXL paper's Tables 2 and 3 on this machine, with real workers, pools and hosts."""
