"""A page with the plots of a run, for eventloop."""

from eventloop_report.page import Page, Table
from eventloop_report.plugin import Report
from eventloop_report.series import Numbers, Series

__all__ = ["Numbers", "Page", "Report", "Series", "Table"]
