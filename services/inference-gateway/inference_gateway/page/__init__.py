"""The files of the page at `/`; `page_route` puts them together."""
