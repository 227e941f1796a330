// Filters, sorts and a cart, all in the page; ordering sends the cart to /send/order.
const articles = [
  { id: "arc", name: "Arc", kind: "floor lamp", price: 129.0, stock: 3 },
  { id: "beam", name: "Beam", kind: "desk lamp", price: 39.5, stock: 0 },
  { id: "candle-4", name: "Candle 4 W", kind: "bulb", price: 6.9, stock: 40 },
  { id: "clip", name: "Clip", kind: "desk lamp", price: 42.0, stock: 12 },
  { id: "dome", name: "Dome", kind: "desk lamp", price: 88.0, stock: 5 },
  { id: "globe-7", name: "Globe 7 W", kind: "bulb", price: 9.9, stock: 0 },
  { id: "reed", name: "Reed", kind: "floor lamp", price: 74.0, stock: 1 },
  { id: "study", name: "Study", kind: "desk lamp", price: 51.0, stock: 7 },
];
const cart = new Map();
const at = id => document.getElementById(id);

function element(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
}

function button(text, label, parent, act) {
  const made = element("button", text, parent);
  made.setAttribute("aria-label", label);
  made.onclick = act;
  return made;
}

function showRows() {
  const word = at("search").value.trim().toLowerCase();
  const kind = at("kind").value;
  const shown = articles.filter(item =>
    item.name.toLowerCase().includes(word) && (kind === "all" || item.kind === kind) &&
    (!at("stock").checked || item.stock > 0));
  const by = at("sort").value;
  shown.sort((a, b) => by === "name" ? a.name.localeCompare(b.name) : (a.price - b.price) * (by.endsWith("low") ? -1 : 1));
  at("rows").replaceChildren();
  for (const item of shown) {
    const row = element("tr", "", at("rows"));
    for (const text of [item.name, item.kind, item.price.toFixed(2), item.stock || "sold out"]) element("td", text, row);
    const last = element("td", "", row);
    if (item.stock) button("Add", `Add ${item.name}`, last, () => add(item));
  }
  at("count").textContent = `${shown.length} of ${articles.length} articles`;
}

function add(item) {
  const count = cart.get(item.id) || 0;
  if (count >= item.stock) {
    alert(`There are only ${item.stock} of ${item.name}.`);
    return;
  }
  cart.set(item.id, count + 1);
  showCart();
}

function showCart() {
  at("cart").replaceChildren();
  let sum = 0;
  for (const [id, count] of cart) {
    const item = articles.find(found => found.id === id);
    sum += count * item.price;
    const line = element("p", `${count} x ${item.name} `, at("cart"));
    button("Remove", `Remove ${item.name}`, line, () => { cart.delete(id); showCart(); });
  }
  element("p", cart.size ? `Total: ${sum.toFixed(2)}` : "The cart is empty.", at("cart"));
  at("order").disabled = !cart.size;
}

async function order() {
  const items = Object.fromEntries(cart);
  await fetch("/send/order", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ items }),
  });
  location.href = "/order-sent.html";
}

for (const id of ["search", "kind", "stock", "sort"]) at(id).addEventListener("input", showRows);
at("order").onclick = order;
showRows();
showCart();
