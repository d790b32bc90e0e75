// Wakes up every chart, and every part once the data are there.

document.querySelectorAll(".canvas").forEach(awaken);
unpack().then((data) => {
  for (const part of document.querySelectorAll("[data-part]")) PARTS[part.dataset.part](part, data);
  document.documentElement.dataset.ready = "yes";
});
