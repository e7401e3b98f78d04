"""`holdover devices`."""

from __future__ import annotations

from holdover.cli.common import DevicesOption, JsonOption, add_devices, fails_politely, show, show_json


@fails_politely
def devices(devices: DevicesOption = None, as_json: JsonOption = False) -> None:
    """List the cards that can be estimated and planned for without having them."""
    from holdover.cost.devices import all_cards
    from holdover.report.devices_view import devices_view

    add_devices(devices)
    cards = all_cards().values()
    if as_json:
        show_json([card.to_dict() for card in cards])
    else:
        show(devices_view(cards))
