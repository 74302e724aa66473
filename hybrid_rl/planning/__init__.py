"""The memory of a run, predicted from config and shapes before anything is loaded: counted, chosen, or refused."""
