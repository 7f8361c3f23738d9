// The page /docs: the routes in openapi.json, with the fields of their bodies.

import { call, useKey } from "./api.js";
import { byId, element } from "./dom.js";

byId("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  show();
});
show();

async function show() {
  try {
    const described = await call("openapi.json");
    byId("keys").hidden = true;
    byId("version").textContent = described.info.version;
    const routes = Object.entries(described.paths).flatMap(([path, operations]) =>
      Object.entries(operations).map(([method, operation]) => route(method, path, operation, described)),
    );
    byId("routes").replaceChildren(...routes);
  } catch (problem) {
    const forbidden = problem.status === 401 || problem.status === 403;
    byId("keys").hidden = !forbidden;
    byId("key-problem").textContent = byId("key").value ? problem.message : "";
    byId("routes").replaceChildren(element("p", { class: "problem" }, problem.message));
  }
}

function route(method, path, operation, described) {
  const content = operation.requestBody?.content["application/json"];
  const body = content ? named(content.schema, described) : null;
  const answers = Object.entries(operation.responses).map(([status, { description }]) => `${status}: ${description}`);
  return element(
    "details",
    { "data-route": path },
    element(
      "summary",
      {},
      element("span", { class: "pill method" }, method.toUpperCase()),
      element("code", {}, path),
    ),
    ...(body ? [fields(body, described, new Set())] : []),
    element("p", { class: "faint" }, answers.join(" · ")),
  );
}

function fields(schema, described, open) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) =>
    element(
      "tr",
      {},
      element("td", {}, element("code", {}, name)),
      element("td", {}, kind(field), schema.required?.includes(name) ? ", required" : ""),
      element("td", {}, field.description ?? "", ...inner(field, described, open)),
    ),
  );
  return element("table", {}, ...rows);
}

/** Return a closed details element for each type of object that a field can have. */
function inner(field, described, open) {
  return references(field)
    .filter((name) => !open.has(name))
    .map((name) =>
      element(
        "details",
        {},
        element("summary", {}, name),
        fields(described.components.schemas[name], described, new Set([...open, name])),
      ),
    );
}

function references(schema) {
  if (schema.$ref) return [nameOf(schema.$ref)];
  const parts = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.items ? [schema.items] : [])];
  return [...new Set(parts.flatMap(references))];
}

function kind(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.anyOf ?? schema.oneOf) return (schema.anyOf ?? schema.oneOf).map(kind).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  return schema.type ?? "anything";
}

const nameOf = (reference) => reference.split("/").at(-1);
const named = (schema, described) => (schema.$ref ? described.components.schemas[nameOf(schema.$ref)] : schema);
