"""The measured programs: one a peer, each answering the commands of ``protocol``."""
