"""Twenty nested JSON schemas as applications send them: with free strings, lists and numbers."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 40}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 1000}
AMOUNT: Schema = {"type": "number", "minimum": 0, "maximum": 100000}
FLAG: Schema = {"type": "boolean"}
DATE: Schema = {"type": "string", "format": "date"}


def obj(**properties: Schema) -> Schema:
    """A closed object whose properties are all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def some(items: Schema, least: int = 1, most: int = 3) -> Schema:
    """A list of a few."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*words: str) -> Schema:
    """One word of a list."""
    return {"type": "string", "enum": list(words)}


def maybe(schema: Schema) -> Schema:
    """The schema or null."""
    return {"anyOf": [schema, {"type": "null"}]}


ADDRESS = obj(street=SHORT, city=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
PERSON = obj(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, home=ADDRESS)

SCHEMAS: dict[str, Schema] = {
    "person": PERSON,
    "family": obj(parents=some(PERSON, 1, 2), children=some(obj(name=SHORT, born=DATE), 0, 2)),
    "invoice": obj(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        date=DATE,
        lines=some(obj(item=SHORT, count=COUNT, price=AMOUNT)),
        total=AMOUNT,
    ),
    "recipe": obj(
        title=SHORT,
        servings=COUNT,
        ingredients=some(obj(name=SHORT, grams=COUNT), 2, 4),
        steps=some(TEXT, 1, 3),
    ),
    "event": obj(
        name=SHORT,
        when=obj(start=DATE, end=maybe(DATE)),
        where=maybe(ADDRESS),
        guests=some(obj(name=SHORT, answer=one_of("yes", "no", "maybe"))),
    ),
    "review": obj(
        product=obj(name=SHORT, category=one_of("book", "film", "game")),
        stars={"type": "integer", "minimum": 1, "maximum": 5},
        pros=some(SHORT, 0, 3),
        cons=some(SHORT, 0, 3),
    ),
    "weather": obj(
        place=SHORT,
        days=some(obj(date=DATE, low={"type": "integer"}, sky=one_of("sun", "rain")), 1, 2),
    ),
    "triage": obj(
        urgency=one_of("low", "medium", "high"),
        department=one_of("billing", "support", "sales"),
        reasons=some(obj(quote=TEXT, weight={"type": "number", "minimum": 0, "maximum": 1}), 1, 2),
    ),
    "entities": obj(
        people=some(obj(name=SHORT, role=maybe(SHORT)), 0, 2),
        places=some(obj(name=SHORT, country=SHORT), 0, 2),
    ),
    "tool call": obj(
        tool=one_of("search", "calculator"),
        arguments=obj(query=TEXT, options=obj(limit=COUNT, exact=FLAG)),
    ),
    "tree": {
        **obj(name=SHORT, children=some({"$ref": "#/$defs/node"}, 0, 2)),
        "$defs": {"node": obj(name=SHORT, children=some(obj(name=SHORT), 0, 2))},
    },
    "quiz": obj(questions=some(obj(text=TEXT, options=some(SHORT, 2, 3), answer=COUNT), 1, 2)),
    "order": obj(
        customer=obj(id={"type": "string", "format": "uuid"}, vip=FLAG),
        payment={
            "anyOf": [
                obj(kind={"const": "card"}, last4={"type": "string", "pattern": "^[0-9]{4}$"}),
                obj(kind={"const": "cash"}, paid=AMOUNT),
            ]
        },
    ),
    "config": obj(
        server=obj(host={"type": "string", "format": "ipv4"}, port=COUNT, tls=FLAG),
        limits=obj(users=COUNT, rate=AMOUNT),
    ),
    "diff": obj(
        files=some(obj(path=SHORT, added=COUNT, removed=COUNT, kind=one_of("add", "edit")))
    ),
    "matrix": obj(name=SHORT, rows=some(some({"type": "integer", "maximum": 99}, 2, 2), 2, 2)),
    "timeline": obj(subject=SHORT, events=some(obj(year=COUNT, what=TEXT), 1, 3)),
    "scores": {
        "type": "object",
        "properties": {
            "title": SHORT,
            "scores": {"type": "object", "additionalProperties": COUNT, "maxProperties": 4},
        },
        "required": ["title", "scores"],
    },
    "contact": obj(
        name=SHORT,
        emails=some({"type": "string", "format": "email", "maxLength": 30}, 1, 2),
        social=obj(site=maybe(SHORT), followers=COUNT),
    ),
    "lesson": obj(
        topic=SHORT,
        level=one_of("beginner", "advanced"),
        parts=some(obj(title=SHORT, minutes=COUNT, exercises=some(SHORT, 0, 2)), 1, 2),
    ),
}
