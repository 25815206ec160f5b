"""An instructor's course over nbgrader: release, run, record, regrade, deadlines, deletion."""
