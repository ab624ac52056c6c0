"""Files made from types are what the types make now."""

from __future__ import annotations

from tests.house.generate import BEGIN, END, OPERATIONS, SCHEMA, operations_page, values_schema


def test_the_chart_schema_is_made_from_the_config_types() -> None:
    assert SCHEMA.read_text() == values_schema(), "run `make schema`"


def test_the_metrics_table_is_made_from_the_declarations() -> None:
    page = OPERATIONS.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert page == operations_page(page), "run `make schema`"
