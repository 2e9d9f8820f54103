"""The README's first program: orders are placed in transactions, and a consumer books each once and in sequence."""

import msgspec
import psycopg

import mqlayer
from mqlayer import outbox

app = mqlayer.App()


class Order(msgspec.Struct):
    """The body of a message."""

    customer: str
    amount: int


def place(order: Order) -> None:
    """The order and its message commit together, or not at all."""
    with psycopg.connect(app.settings.application_dsn()) as connection:
        connection.execute("INSERT INTO orders VALUES (%s, %s)", (order.customer, order.amount))
        outbox.publish(connection, "orders", key=order.customer, body=order)


@app.consumer("orders", group="ledger")
def book(order: Order, ctx: mqlayer.Context) -> None:
    """The fence lets the booking commit only once, and only while this process owns the key."""
    with psycopg.connect(app.settings.application_dsn()) as connection:
        ctx.fence(connection)
        connection.execute("INSERT INTO ledger VALUES (%s, %s)", (order.customer, order.amount))
    print(f"booked {order.amount} for {order.customer}")


if __name__ == "__main__":
    with psycopg.connect(app.settings.application_dsn()) as setup:
        setup.execute("CREATE TABLE IF NOT EXISTS orders (customer text, amount int)")
        setup.execute("CREATE TABLE IF NOT EXISTS ledger (customer text, amount int)")
    for amount in (10, 20, 30):
        place(Order("customer-1", amount))
