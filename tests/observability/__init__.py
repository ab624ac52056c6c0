"""Real groups under load, with faults injected one after the other: does the product name what is wrong?"""
